"""Workloads from Hugging Face configurations: read `config`, then its `fields` one by one, and the `families`."""
