"""Trainer ranks on Megatron-Core: the only room that imports Megatron."""
