"""Exact reuse for trainers that own their engines: docs/adapters.md."""
