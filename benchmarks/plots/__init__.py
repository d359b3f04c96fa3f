"""Plots of the figures, each drawn by the benchmark of the same name if ``--plots`` names a folder.

- ``accuracy``: log loss and AUC by the number of restores.
- ``alternatives``: stalls, times of saves and restores, and memory by the number of rows.
- ``bandwidth``: bytes written and kept over a run.
- ``headline``: the picture at the top of the README.
- ``modified``: modified rows by interval.
- ``movement``: distances that rows move, and bits of an element.
- ``policies``: bytes written, kept and restored over a long run.
- ``style``: the style of the plots, and a function that writes them.
- ``quantization``: errors by bytes per row; also a program that makes the plot and the tables of its page.
"""
