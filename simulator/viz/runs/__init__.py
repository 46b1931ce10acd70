"""Pictures of a whole run: `cost_curve` (days and price by number of devices), `goodput` (where its time goes)."""
