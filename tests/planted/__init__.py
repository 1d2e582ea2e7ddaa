"""Defects that are planted on purpose: each test plants one and shows which check, refusal or evidence finds it.

``docs/trust.md`` lists them all; ``tests/unit/test_trust.py`` compares that page with this folder.
"""
