"""A reward that differs between any two texts and costs nothing: every group of a benchmark has spread."""

import zlib


def reward_func(queries, prompts, labels):
    return [zlib.crc32(query.encode()) / 2**32 for query in queries]
