"""JupyterLab for the lessons, on this machine alone.

Read `server`; `serve` is the child process that ends when its parent does, and `websocket` connects a page to its
kernel.
"""
