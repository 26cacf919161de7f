"""Handlers of producers' sends, and of messages that consumers send back."""

from __future__ import annotations

from duemq.broker.assembly.core import Core, Handlers
from duemq.broker.assembly.net import Net
from duemq.broker.assembly.storage import Storage
from duemq.broker.assembly.tables import Tables
from duemq.broker.produce.answers import SendAnswers
from duemq.broker.produce.batches import BatchHandlers
from duemq.broker.produce.key_turns import KeyTurns
from duemq.broker.produce.message import of_broker
from duemq.broker.produce.replace import Replacements
from duemq.broker.produce.retries_and_dead_letters import RetriesAndDeadLetters
from duemq.broker.produce.send import SendHandlers
from duemq.broker.produce.send_back import SendBackHandlers
from duemq.broker.produce.send_topics import SendTopics
from duemq.broker.produce.special_sends import SpecialSends
from duemq.broker.produce.staging import Staging
from duemq.broker.produce.when_ready import WhenReady


def assemble_produce(
    core: Core, tables: Tables, storage: Storage, net: Net, key_turns: KeyTurns
) -> tuple[Handlers, ...]:
    """Return the handlers. `key_turns`: lets one change of messages with a key follow the other."""
    config, settings, store, clock, reads = core.config, core.settings, core.store, core.clock, core.reads
    levels, timers, router, appender = storage.levels, storage.timers, net.router, core.store.appender
    added = of_broker(config.cluster_name, config.region, is_traced=config.trace_on)
    topics = SendTopics(settings, tables.topics, net.held)
    retries = RetriesAndDeadLetters(tables.topics, tables.groups)
    staging = Staging(store, levels, timers, added)
    answers = SendAnswers(config, appender.store_host)
    when_ready = WhenReady(tables.topics, appender, router, clock, reads)
    batches = BatchHandlers(
        settings=settings,
        appender=appender,
        topics=topics,
        when_ready=when_ready,
        answers=answers,
        limits=core.limits,
        added=added,
    )
    replacements = Replacements(
        store=store,
        topics=topics,
        levels=levels,
        timers=timers,
        staging=staging,
        answers=answers,
        router=router,
        clock=clock,
        turns=key_turns,
    )
    special = SpecialSends(
        appender=appender,
        topics=topics,
        retries=retries,
        staging=staging,
        batches=batches,
        replacements=replacements,
        answers=answers,
        reads=reads,
    )
    send = SendHandlers(
        store=store,
        topics=topics,
        levels=levels,
        timers=timers,
        staging=staging,
        when_ready=when_ready,
        special=special,
        answers=answers,
        reads=reads,
    )
    send_back = SendBackHandlers(
        settings=settings,
        store=store,
        topics=tables.topics,
        groups=tables.groups,
        retries=retries,
        staging=staging,
        router=router,
        clock=clock,
        reads=reads,
        stats=net.stats,
    )
    return (send, batches, send_back)
