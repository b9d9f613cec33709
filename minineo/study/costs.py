"""What a pass costs, counted from the shape of a model alone: bytes read and operations done."""


def layer_matrices(config):
    """Return how many numbers the matrices of one layer hold."""
    return 4 * config.width**2 + 2 * config.width * config.inner


def matrices(config):
    """Return how many numbers all matrices hold that a token is multiplied by."""
    return config.n_layers * layer_matrices(config) + config.vocab * config.width


def weight_bytes(config, itemsize=4):
    """Return the bytes of weights that one decode step reads.

    They are all matrices, biases and norms. Of the token and the position table a step looks up
    one row each, which is not counted; but the unembedding is read whole.
    """
    biases_and_norms = config.inner + 6 * config.width  # two biases of width, two norms of two
    vectors = config.n_layers * biases_and_norms + 2 * config.width
    return itemsize * (matrices(config) + vectors)


def cache_bytes_read(config, depth, itemsize=4):
    """Return the bytes of keys and values that one row's decode step looks at.

    Parameters
    ----------
    config : Config
    depth : int
        Number of tokens in the cache before the step; its query sees its own key too.
    itemsize : int, optional
        Bytes of one number.
    """
    seen = sum(min(window, depth + 1) for window in config.windows)
    return 2 * itemsize * config.width * seen


def prefill_flops(config, tokens):
    """Return the floating-point operations in the matrix products of a prefill.

    A product of n numbers counts 2 n. Scores and mix count for what each query may see and no
    more, and the logits of the last token alone, whatever an implementation does beyond that.
    """
    linear = 2 * tokens * config.n_layers * layer_matrices(config)
    pairs = sum(visible_pairs(tokens, window) for window in config.windows)
    attention = 2 * 2 * config.width * pairs  # queries @ keysᵀ, then pattern @ values
    unembedding = 2 * config.vocab * config.width
    return linear + attention + unembedding


def visible_pairs(tokens, window):
    """Return how many pairs of a query and a key it may see are in a layer."""
    window = min(window, tokens)
    return window * (window + 1) // 2 + (tokens - window) * window
