"""Pictures of whole runs.

Read `cost_curve` (days and price by number of devices), `goodput` (where a run's time goes), then `strategies` (which
plan is fastest, for models and numbers of devices).
"""
