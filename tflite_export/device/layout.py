"""The names of all files of a bundle, with what is in them. This module imports nothing."""

MANIFEST = "manifest.json"  # shapes, offsets, signatures, hashes, preprocessing, labels, settings, quality, runtimes
PROGRAM = "program.tflite"  # the program without weights, for any number of examples and classes; see program.py
STATIC_PROGRAM = "program_static.tflite"  # the same with 32 examples and the client's K, for runtimes without resizing
THETA = "theta.bin"  # the backbone's weights: float32, flat
HEAD = "head.bin"  # the client's head; see head_file.py
LABELS = "labels.txt"  # one class on each line
CHECK = "check.npz"  # inputs and the outputs expected of them; only `verify` reads them
MODEL_CARD = "MODEL_CARD.md"  # what the model is, for people

# These exist only if exported with `inference`: for apps that predict and do not train.
PREDICT = "predict.tflite"  # backbone and head in one
BACKBONE = "backbone.tflite"  # the backbone alone, in four precisions
BACKBONE_FLOAT16 = "backbone_float16.tflite"
BACKBONE_DYNAMIC_INT8 = "backbone_dynamic_int8.tflite"
BACKBONE_INT8 = "backbone_int8.tflite"

# These exist only if the lower layers of the backbone are frozen, as with `train_from`: they compute an example's input
# of the program, once for ever. The two smaller ones need `inference`. All but the first are for exactly 32 examples:
# LiteRT's C API cannot change the number of rows where a program computes a shape by itself.
TRUNK = "trunk.tflite"
TRUNK_STATIC = "trunk_static.tflite"
TRUNK_FLOAT16 = "trunk_float16.tflite"
TRUNK_INT8 = "trunk_int8.tflite"

INEXACT = (BACKBONE_FLOAT16, BACKBONE_DYNAMIC_INT8, BACKBONE_INT8, TRUNK_FLOAT16, TRUNK_INT8)

# These exist only if exported with `browser`: for a page in a browser; see browser.py.
BROWSER_PROGRAM = "program_browser.tflite"
CLIENT = "client.safetensors"

# A site has these beside its bundle's files, if it was written with members: a federation that the page plays.
MEMBERS_ABOUT = "members.json"
MEMBERS = "members.safetensors"
