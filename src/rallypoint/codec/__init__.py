"""How a payload is written: encoders and decoders between a shard's fp32 words and bytes.

    spec        which codec a job uses, as data                     imports no torch
    build       the codec of a spec: for a worker, for a server
    protocol    what every codec promises
    cast        raw, fp16, bf16          2 to 4 bytes a word
    blocks      int8, int4               a scale for each block
    sign        1 bit a word             a scale for each block
    sparse      top-k, random-k          the largest, or random ones
    lowrank     PowerSGD                 two thin factors of a matrix
    dgc         Deep Gradient Compression
    feedback    error feedback around any lossy codec: what was not sent goes into the next step
    payload     a payload's bytes as tensors, checked; scratch: the buffers they are worked through

Formats are little-endian and carry no header: the frame says which codec, the layout how many words.
"""
