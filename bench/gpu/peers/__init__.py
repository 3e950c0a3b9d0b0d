"""Other implementations of paged decode, timed as octavo_gpu_bench times ours. Each module is a process of its own:

python3 -m peers.NAME --works FILE --json FILE [--library DIR]

FILE of --works has a work's name a line. Exit status 3: the peer is not installed; the last line of the output says
what is missing. A work that the peer does not take is recorded with its refusal.
"""

ABSENT = 3
