"""Codecs: how a shard's fp32 words are encoded as bytes and decoded again.

    spec        which codec a job uses, as data                     imports no torch
    build       the codec of a spec: for a worker, for a server
    base        the protocol of every codec; payloads as checked tensors; scratch buffers; random bits; rows of tables
    cast        raw, fp16, bf16          2 to 4 bytes a word
    blocks      int8, int4               a scale for each block
    sign        1 bit a word             a scale for each block
    sparse      top-k, random-k          the largest, or random ones
    lowrank     PowerSGD                 two thin factors of a matrix
    dgc         Deep Gradient Compression
    feedback    error feedback around any lossy codec: what was not sent is added at the next step
    state       codec state as bytes
    shards      the codec of each shard of a job

Formats are little-endian and have no header: the frame names the codec, the layout gives the number of words.
"""
