package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// At shutdown the library commits what it has finished, and a listener that has just told its message has not returned.
const lastCallback = 100 * time.Millisecond

// consumers are the push consumers of this process, by handle. Each message they get is told as an event.
type consumers struct {
	mutex sync.Mutex
	known map[string]rocketmq.PushConsumer
	tell  func(object)
}

func newConsumers(tell func(object)) *consumers {
	return &consumers{known: make(map[string]rocketmq.PushConsumer), tell: tell}
}

func (c *consumers) start(r request) (object, error) {
	from := consumer.ConsumeFromFirstOffset
	if r.Begin == "last" {
		from = consumer.ConsumeFromLastOffset
	}
	options := []consumer.Option{
		consumer.WithNsResolver(resolver(r.Nameserver)),
		consumer.WithGroupName(r.Group),
		consumer.WithInstance(r.Handle),
		consumer.WithConsumeFromWhere(from),
		consumer.WithConsumerOrder(r.Orderly),
		consumer.WithSuspendCurrentQueueTimeMillis(100 * time.Millisecond),
	}
	if r.AccessKey != "" {
		options = append(options, consumer.WithCredentials(primitive.Credentials{AccessKey: r.AccessKey, SecretKey: r.SecretKey}))
	}
	if r.Model == "broadcast" {
		options = append(options, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	if r.MaxReconsumeTimes != nil {
		options = append(options, consumer.WithMaxReconsumeTimes(*r.MaxReconsumeTimes))
	}
	started, err := rocketmq.NewPushConsumer(options...)
	if err != nil {
		return nil, err
	}
	again := consumer.ConsumeRetryLater
	if r.Orderly {
		again = consumer.SuspendCurrentQueueAMoment
	}
	listener := func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		result := consumer.ConsumeSuccess
		for _, message := range messages {
			c.tell(object{"event": "message", "consumer": r.Handle, "message": received(message)})
			if message.ReconsumeTimes < r.FailFirst {
				result = again
			}
		}
		return result, nil
	}
	for _, s := range r.Subscriptions {
		selector := consumer.MessageSelector{Type: consumer.TAG, Expression: s.Expression}
		if err := started.Subscribe(s.Topic, selector, listener); err != nil {
			return nil, err
		}
	}
	if err := started.Start(); err != nil {
		return nil, err
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.known[r.Handle] = started
	return object{}, nil
}

func (c *consumers) stop(r request) (object, error) {
	c.mutex.Lock()
	stopped, known := c.known[r.Handle]
	delete(c.known, r.Handle)
	c.mutex.Unlock()
	if !known {
		return nil, fmt.Errorf("no consumer %s", r.Handle)
	}
	time.Sleep(lastCallback)
	return object{}, stopped.Shutdown()
}
