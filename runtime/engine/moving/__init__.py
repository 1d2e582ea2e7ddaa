"""Blocks of paged state that move between engines of one bundle and processor level, rather than being computed again.

The engine that needs blocks dials the one that has them, as a gateway does, with the same key and handshake, and asks
for them by their keys, a few megabytes ahead of what it has taken in. Neither side waits: sockets, checksums and copies
belong to threads, and the engine's own thread only says between two steps which blocks are lent, reserved and there. A
request waits for its blocks while that is quicker than to compute them. Whatever goes wrong, it is
computed from where the blocks end.

    checksums of what is sent
    costs     how fast links are, and whether a fetch is worth its time
    sending   to one engine that fetches
    fetching  from one engine that sends
    moves     all of it, for the engine's own thread
"""
