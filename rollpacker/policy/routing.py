"""RequestRouter: which replica decodes which response."""

from __future__ import annotations


class RequestRouter:
    """Deals responses out to the replicas one by one, so that the responses of a group decode on different replicas and
    every replica gets as many as the others (give or take one).
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def assign(self, num_requests: int, first_index: int = 0) -> list[int]:
        """The replica of each request, in launch order; `first_index` is the first one's place in the round."""
        return [(first_index + i) % self._num_replicas for i in range(num_requests)]
