"""How good compressed fine-tunes are: fine-tunes made here on small tasks, and every method judged on them.

`tasks` says what is learned, `train` makes the fine-tunes, `quality` compresses and judges them, `speed`
times the methods on layers of Llama-2-7B, `plot` draws.
"""
