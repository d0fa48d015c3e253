"""Plan a reduction, and decide for one participant what to send, take in and add next; pure."""
