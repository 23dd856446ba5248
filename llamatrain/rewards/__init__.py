"""Rewards of generated answers, computed by the user's functions and programs in processes of their own."""
