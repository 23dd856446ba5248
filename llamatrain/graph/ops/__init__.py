"""The ops, a file for each family: shape rule, gradient rule and properties of each op.

Kernels of the same names are in files of the same names in `kernels/reference`. Gradients are graphs of these
ops; a `_back` op is a gradient in one piece, fused where that pays.
"""

# ruff: noqa: F403  an op is named in its own file alone
from llamatrain.graph.ops.activations import *
from llamatrain.graph.ops.arithmetic import *
from llamatrain.graph.ops.attention import *
from llamatrain.graph.ops.convolution import *
from llamatrain.graph.ops.dropout import *
from llamatrain.graph.ops.experts import *
from llamatrain.graph.ops.gates import *
from llamatrain.graph.ops.ggml_extra import *
from llamatrain.graph.ops.int8 import *
from llamatrain.graph.ops.log_prob import *
from llamatrain.graph.ops.losses import *
from llamatrain.graph.ops.matmul import *
from llamatrain.graph.ops.movement import *
from llamatrain.graph.ops.norm import *
from llamatrain.graph.ops.optimizer import *
from llamatrain.graph.ops.quantize import *
from llamatrain.graph.ops.recurrent import *
from llamatrain.graph.ops.reduce import *
from llamatrain.graph.ops.rope import *
from llamatrain.graph.ops.rows import *
from llamatrain.graph.ops.shape_rules import *
from llamatrain.graph.ops.softmax import *
