"""A stand-in for NVIDIA's Apex: the calls, their order and the arithmetic of its loss scaling, on the CPU.

It refuses what Apex refuses (wrapped models, fp16 models, an optimizer twice), and notes each call in `calls`. It casts
no functions under O1, so that a run can be compared with fp32 bit by bit; its SyncBatchNorm shares nothing.
"""

calls: list[str] = []
