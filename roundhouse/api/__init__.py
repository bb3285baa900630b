"""The Python API: what `import roundhouse as rh` offers for runs, their data and their models.

It reads the store through the same functions as the command line. `train` starts the command line's training in a
child process, so that a notebook's event loop, signals and memory stay as they are.
"""
