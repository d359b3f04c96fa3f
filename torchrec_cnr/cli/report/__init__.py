"""The page that ``cnr report`` writes: one HTML file with plots, which needs no network, script or other file.

- ``page``: fills the template in ``templates/`` with plots and text.
- ``findings``: the totals of a run, and the sentences below each plot.
- ``plots``: draws each plot of a run history.
- ``svg``: turns a matplotlib figure into SVG that uses the page's colours and prints well.
"""
