"""Bring state to those who lack it: pieces from many donors, and results of attempts."""
