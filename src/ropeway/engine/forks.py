"""Requests that wait for another one's prompt, to share its blocks: the choices of one client request.

Owns: who waits for whom. Must not know: blocks, order of admission, budgets. Called by: the scheduler.

The first choice computes the prompt. The others are kept from the waiting queue until it has; then each takes over the
blocks in which the prompt lies, and a copy of the one that goes on behind it, and computes the last prompt token once
more, from which it draws its own first token with its own seed.
"""

from __future__ import annotations

from collections.abc import Iterator

from ropeway.engine.request import Request, RequestStatus


class Forks:
    def __init__(self) -> None:
        self._children: dict[int, list[Request]] = {}  # by the parent's request id

    def add(self, child: Request, parent: Request) -> None:
        child.parent = parent
        self._children.setdefault(parent.request_id, []).append(child)

    def remove(self, child: Request) -> bool:
        """Whether it waited here."""
        siblings = self._children.get(child.parent.request_id, []) if child.parent is not None else []
        if child not in siblings:
            return False
        siblings.remove(child)
        if not siblings and child.parent is not None:
            del self._children[child.parent.request_id]
        return True

    def pop_ready(self) -> list[Request]:
        """All whose parents' blocks hold the prompt, once the steps that are planned already have run."""
        ready: list[Request] = []
        for parent_id, children in list(self._children.items()):
            parent = children[0].parent
            assert parent is not None
            if parent.status is RequestStatus.RUNNING and parent.num_computed_tokens >= parent.num_prompt_tokens:
                for child in children:
                    child.parent_epoch = parent.epoch
                ready += self._children.pop(parent_id)
        return ready

    def pop_orphans(self, parent: Request) -> list[Request]:
        """All that wait for ``parent``, which has ended. They are like any other request now."""
        orphans = self._children.pop(parent.request_id, [])
        for child in orphans:
            child.parent = None
        return orphans

    def __len__(self) -> int:
        return sum(map(len, self._children.values()))

    def __iter__(self) -> Iterator[Request]:
        return (child for children in self._children.values() for child in children)


def prompt_holder(child: Request) -> Request | None:
    """Whose blocks hold its prompt: its parent, if that has not ended nor been preempted since its prompt was computed.
    (That it is being computed again would not do: copies are made before a step computes anything.)"""
    parent = child.parent
    return parent if parent is not None and parent.epoch == child.parent_epoch else None


def may_fork(child: Request, parent: Request) -> bool:
    """Whether the parent's blocks would be right for it. (The prompts are compared, because it costs little and another's
    KV would be a leak.)"""
    return (
        child.cache_salt == parent.cache_salt
        and not child.needs_every_prompt_token
        and child.num_prompt_tokens == parent.num_prompt_tokens == len(child.token_ids)
        and child.token_ids == parent.token_ids[: parent.num_prompt_tokens]
    )
