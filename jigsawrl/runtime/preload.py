"""Imported once, by the process from which all drivers and actors are forked: heavy modules, and nothing started.

Some would only be imported on first use, by every process anew: an optimizer brings in `torch._dynamo`, a tokenizer
`transformers`.
"""

from jigsawrl.processes import die_with_parent

die_with_parent()  # before the imports, which take seconds

from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402, F401

import jigsawrl.pipeline.loop  # noqa: E402
import jigsawrl.runtime.driver  # noqa: E402, F401
