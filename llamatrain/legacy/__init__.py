"""Files and command lines of llama.cpp's programs of 2023: train-text-from-scratch, finetune and export-lora.

`EXTENSIONS` names what this package adds to packages below it; see `llamatrain/extensions.py`.
"""

EXTENSIONS = {
    "file_formats": "checkpoint_file:FORMATS",
    "checkpoint_upgrade": "checkpoint_upgrade:upgrade",
    "adapter_formats": "adapter_formats:FORMATS",
    "command_lines": "translate:translate_command_line",
}
