"""The machine of a simulation, which knows nothing of what is simulated.

- ``scheduler``: tasks, of which one runs at a time; logical time; decisions that a seed makes and that can be undone.
- ``virtual``: threads, locks, clocks and random values, as the library finds them in a simulation.
- ``collectives``: process groups of simulated ranks.
- ``storage``: an object store in memory, with faults.
- ``installing``: puts these in the place of the real ones.
- ``ending``: what the interpreter does when the script of a process has ended.
"""
