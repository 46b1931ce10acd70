"""Workloads from Hugging Face configurations: `config`, its `fields` one by one, and `families` that resemble Llama."""
