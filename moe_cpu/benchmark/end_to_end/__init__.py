"""Measures whole transformers models: time to the first token, tokens/s, the share of the experts, peak memory, the same answers.

`runner.run(settings)` returns a `report.EndToEndReport`; nothing here prints. The command line for it is ``moe-cpu bench --model-dir`` and
``--random-config``. Reports can be read and drawn without transformers.
"""
