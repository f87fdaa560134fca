"""From a function to a compiled program: trace, find repeated blocks, cut into steps, compile.

Nothing here knows a stream or a device; `neuron_streams.executables` is the door.

build.py      what `compile` does, from the first check to the program
trace.py      a function as a graph of aten operators; draws.py, its random operators
blocks.py     repeated blocks, found and traced once
segment.py    pieces of a graph
plan.py       the pieces in order, as steps of a program
library.py    pieces compiled to shared libraries, and kept on disk
signature.py  what an executable promises
archive.py    executables as files; saved.py, what such a file says of itself
neuron.py     a NEFF instead, from a process of its own (neuron_child.py)
"""
