"""Logdirs in object stores, by fsspec.

A run writes to a local staging folder, as to any other logdir, and a thread keeps the store equal to it:

- ``checkpoints/objects/SHA256``: the files of checkpoints, which never change.
- ``csv/train.csv`` and other logs, under their names, replaced as a whole.
- ``manifest.json``: the checkpoints' names and objects, and the logs; written last, so that readers see no part of one.
- ``lease.json``: the run that may write.

A run starts with an empty staging folder and what the manifest names, so the store alone decides what is resumed.
"""
