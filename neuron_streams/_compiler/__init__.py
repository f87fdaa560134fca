"""From a function to a compiled program: trace, find repeated blocks, cut into steps, compile.

The rooms behind `neuron_streams.executable`; nothing here knows a stream or a device.
"""
