"""The forecast of a node's response to a prompt, and the harm that it does to others there; seconds."""

from edged.placement.node import NodeView, RoutedRequest


def response_s(node: NodeView, arrival: RoutedRequest) -> float:
    """Return the seconds until a prompt's first token at a node: R of `fleet`, from LeMix' R = wait + own time.

    The backlog and the prompt less its known beginning go in chunks beside the node's decodes, at its own prices; half
    an iteration and half a fine-tune unit are under way; without a free sequence or page, an answer must end first. It
    is never less than the way of the user's adapter to the node and the prompt's own chunks.
    """
    prompt = node.tokens_to_compute(arrival)
    running_s = 0.5 * (node.pass_s(0) if node.load.decodes else 0.0) + 0.5 * node.load.unit_s
    waited_s = _chunks_s(node, node.backlog_tokens + prompt) + running_s + _room_s(node, prompt)
    way_s = arrival.ways.get(node.name, 0.0)
    return max(waited_s, way_s + _chunks_s(node, prompt) if way_s else 0.0) * node.calibration


def _chunks_s(node: NodeView, tokens: int) -> float:
    """Return the seconds of the chunks in which so many tokens are computed."""
    chunks, rest = divmod(tokens, node.chunk_tokens)
    return chunks * node.pass_s(node.chunk_tokens) + (node.pass_s(rest) if rest else 0.0)


def _room_s(node: NodeView, prompt: int) -> float:
    """Return how long a prompt waits for a place and pages: until one of the answers has ended for each that waits."""
    load = node.load
    short = load.free_sequences <= len(node.sent) or load.free_pages * load.page_tokens < prompt
    return node.answer_s * (node.waiting + 1) / load.decodes if short and load.decodes else 0.0


def harm_s(node: NodeView, arrival: RoutedRequest) -> float:
    """Return the seconds that a prompt adds to the requests at a node, summed: H of `fleet`.

    Those that wait are behind it with a half's chance; decodes have their chunks in about a fourth of what they wait.
    """
    own_s = node.tokens_to_compute(arrival) * node.cost.token_s * node.load.slowness
    return own_s * (0.5 * node.waiting + 0.25 * node.load.decodes)
