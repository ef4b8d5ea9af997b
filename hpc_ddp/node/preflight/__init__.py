"""The preflight: tests an attempt's nodes before the training, and names the unfit ones.

``driver`` runs in the batch shell and asks; ``checks`` is the task of each node and answers, with
``links`` to its partners, and ``bandwidth`` by torch; ``blame`` judges the answers.
"""
