"""This machine: how fast it is, what it is, and programs compared on it.

Read `speed` (calibrate, and keep the result) and `fit` (programs that take turns, medians, and fits without
negative terms). Then `facts` (processor, versions) and `ranks` (devices, clocks, numbers that are the same on every
rank, and what other processes take from them). `rates` is for one GPU: what its kernels take by kind and shape.
"""
