"""What the demo assistant can talk about."""

from examples.demo_model.topics import household, kitchen, outdoors, talk

TOPICS = (*kitchen.TOPICS, *outdoors.TOPICS, *household.TOPICS, *talk.TOPICS)
"""Every topic that may open a dialogue; `talk.ASK_NAME` needs an earlier turn."""
