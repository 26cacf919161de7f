"""For tests of programs that use delayed messages: a broker in the test's own process, and clocks that can be advanced.

    with TestBroker() as broker:
        async with Producer(broker.nameserver) as producer:
            await producer.send("reminders", b"call back", delay="2h")
        broker.clock.advance("2h")

With pytest the fixtures `duemq_broker` and `duemq_clock` do the same. `pip install 'duemq[test]'` installs the packages
that a broker needs. `TestClock` advances the clocks of brokers that run elsewhere.
"""

from duemq.testing.broker import BrokerClock, TestBroker
from duemq.testing.clock import TestClock

__all__ = ["BrokerClock", "TestBroker", "TestClock"]
