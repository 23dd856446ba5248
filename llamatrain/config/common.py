"""Options that several commands have, each with its own sentence."""

from llamatrain.config.options import COUNT, Option

THREADS = Option("Threads; else one for each processor.", unit="COUNT", least=1, most=1024)
CTX = Option(
    "Tokens in a row; else what the model was made for, but no more than 512.",
    unit="TOKENS",
    least=1,
    most=1 << 20,
)
BATCH = Option("Rows that are run together.", unit="ROWS", least=1, most=1 << 16)
SEED = Option("What first weights, shuffling and samples follow from.", unit="NUMBER", least=0, most=COUNT)
JSON = Option("Print one JSON object.")
EVERY = Option("Every so many steps; 0: never.", unit="STEPS", least=0, most=COUNT)
