"""Wikipedia -> documents -> tokens -> batches.

    sources, wikipedia    files -> documents (text)
    tokenizer             text -> token ids
    prepare               documents -> Megatron's indexed dataset, a .bin/.idx pair
    pairs, writer         the pair on disk: found, checked, written
    indexed               the pair as a sequence of documents (torch)
    batches               documents -> what a rank trains on at (iteration, micro-batch) (torch)

Only ``indexed`` and ``batches`` import torch; ``tokenizer`` imports transformers when a folder is loaded,
``wikipedia`` mwparserfromhell when a page is read.
"""
