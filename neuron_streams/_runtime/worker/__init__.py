"""The native worker: C that schedules lanes (worker.h tells which file does what), and its seams.

A folder of its own because it is one thing in five files of C, none of which Python may touch but
through `library.py`.
"""
