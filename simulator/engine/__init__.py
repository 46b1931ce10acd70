"""The event engine: when every operation starts and ends, exactly, in whole nanoseconds.

Read `task_graph` (operations and what each waits for), then `event_engine` (which runs them).
"""
