"""Variants of GRPO, one file each: diff them against grpo.py."""
