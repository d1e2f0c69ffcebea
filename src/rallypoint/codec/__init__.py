"""Codecs: how a shard's fp32 words are encoded as bytes and decoded again.

    spec        which codec a job uses, as data                     imports no torch
    build       the codec of a spec, for a worker, for a server, for each shard; codec state as bytes
    base        the protocol of codecs; payloads as checked tensors; scratch buffers; error feedback; rows of tables
    blocks      raw, fp16, bf16 (2 to 4 bytes a word); int8, int4, sign (a scale for each block)
    sparse      top-k, random-k (the largest, or random ones), Deep Gradient Compression
    lowrank     PowerSGD (two thin factors of a matrix)

A new codec: a struct in `spec.py` and in its `CodecSpec`, a class with the next free `code` (1 to 8 are taken), a case
in `build.py`, an entry in `tests/codec/codec_cases.py`, a row in docs/compression.md.

Formats are little-endian and have no header: the frame names the codec, the layout gives the number of words.
"""
