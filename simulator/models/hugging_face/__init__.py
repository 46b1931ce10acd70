"""Workloads from Hugging Face configurations.

Read `config`, then its `fields` one by one, `families` that resemble Llama, `mixtures` of experts, and their `windows`.
"""
