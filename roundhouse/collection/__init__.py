"""Collecting while training: who may begin, who trains on what, who gets which weights."""
