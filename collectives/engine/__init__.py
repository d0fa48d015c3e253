"""Run reductions: send, receive and add up the chunks that a schedule names."""
