"""The preflight: tests an attempt's nodes before the training, and names the unfit ones.

``driver`` runs in the batch shell and asks; ``checks`` is the task of each node and answers, with
``links`` to its partners; ``blame`` judges the answers. Questions that need torch are answered by
``bandwidth``, in a job under torchrun in a fork of its agent (``agent_part``).
"""
