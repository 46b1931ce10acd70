"""This machine: how fast it is, what it is, and programs compared on it.

Read `speed` (calibrate, and keep the result) and `fit` (programs that take turns, medians, and fits without
negative terms). Then `facts` (processor, versions), `others` (what other processes take from the ranks) and `ranks`
(devices, clocks, and numbers that are the same on every rank). `rates` is for one GPU: what its kernels take by
kind and shape.
"""
