"""Plots of the reports, one for each benchmark of the same name; ``quantization`` is that of ``error``.

The command line draws them into the folder of ``--plots``, after a measurement or from the file of ``--redraw``.

- ``accuracy``: log loss and AUC by the number of restores.
- ``alternatives``: stalls, times of saves and restores, and memory for the largest table.
- ``bandwidth``: bytes written and kept over a run.
- ``headline``: the picture at the top of the README.
- ``modified``: rows modified since the first interval.
- ``movement``: distances that rows move, and bits per value.
- ``policies``: bytes written, kept and read over a long run.
- ``style``: the style of the plots, their bars and labels, and the function that writes them.
- ``quantization``: bytes per row and errors of schemes; also a program that makes the plot and the tables of its page.
"""
