"""All that is done to torch: the device below Python (csrc), and process groups over it.

csrc/           the C++ extension
c10d/           the C++ backend of process groups, a library of its own
distributed.py  gives device tensors to process groups
"""
