package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// producers are those of this process, by handle.
type producers struct {
	mutex sync.Mutex
	known map[string]rocketmq.Producer
}

func newProducers() *producers {
	return &producers{known: make(map[string]rocketmq.Producer)}
}

// anySelector takes the library's selectors together, which it wants one a producer: a queue that the request names,
// else the queue of the sharding key, else one after the other.
type anySelector struct {
	byKey  producer.QueueSelector
	inTurn producer.QueueSelector
}

func (s anySelector) Select(message *primitive.Message, queues []*primitive.MessageQueue, lastBrokerName string) *primitive.MessageQueue {
	if message.Queue != nil {
		for _, queue := range queues {
			if queue.QueueId == message.Queue.QueueId {
				return queue
			}
		}
	}
	if message.GetShardingKey() != "" {
		return s.byKey.Select(message, queues, lastBrokerName)
	}
	return s.inTurn.Select(message, queues, lastBrokerName)
}

func (p *producers) start(r request) (object, error) {
	options := []producer.Option{
		producer.WithNsResolver(resolver(r.Nameserver)),
		producer.WithGroupName(r.Group),
		producer.WithInstanceName(r.Handle),
		producer.WithVIPChannel(r.VIP),
		producer.WithQueueSelector(anySelector{producer.NewHashQueueSelector(), producer.NewRoundRobinQueueSelector()}),
	}
	if r.AccessKey != "" {
		options = append(options, producer.WithCredentials(primitive.Credentials{AccessKey: r.AccessKey, SecretKey: r.SecretKey}))
	}
	if r.TimeoutMs > 0 {
		options = append(options, producer.WithSendMsgTimeout(time.Duration(r.TimeoutMs)*time.Millisecond))
	}
	if r.Retries != nil {
		options = append(options, producer.WithRetry(*r.Retries))
	}
	if r.CompressOver != nil {
		options = append(options, producer.WithCompressMsgBodyOverHowmuch(*r.CompressOver))
	}
	started, err := rocketmq.NewProducer(options...)
	if err != nil {
		return nil, err
	}
	if err := started.Start(); err != nil {
		return nil, err
	}
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.known[r.Handle] = started
	return object{}, nil
}

func (p *producers) get(handle string, remove bool) (rocketmq.Producer, error) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	found, known := p.known[handle]
	if !known {
		return nil, fmt.Errorf("no producer %s", handle)
	}
	if remove {
		delete(p.known, handle)
	}
	return found, nil
}

func (p *producers) stop(r request) (object, error) {
	stopped, err := p.get(r.Handle, true)
	if err != nil {
		return nil, err
	}
	return object{}, stopped.Shutdown()
}

func (p *producers) send(r request) (object, error) {
	by, err := p.get(r.Handle, false)
	if err != nil {
		return nil, err
	}
	var queue *primitive.MessageQueue
	if r.QueueID != nil {
		queue = &primitive.MessageQueue{Topic: r.Topic, QueueId: *r.QueueID}
	}
	messages := make([]*primitive.Message, 0, len(r.Messages))
	for _, message := range r.Messages {
		messages = append(messages, message.message(r.Topic, queue))
	}
	ctx := context.Background()
	var results []object
	switch r.Mode {
	case "sync":
		for _, message := range messages {
			results = append(results, sent(by.SendSync(ctx, message)))
		}
	case "async":
		results = sendAsync(ctx, by, messages)
	case "oneway":
		for _, message := range messages {
			if err := by.SendOneWay(ctx, message); err != nil {
				results = append(results, object{"error": failure(err)})
			} else {
				results = append(results, object{"status": "SENT"})
			}
		}
	case "batch":
		results = append(results, sent(by.SendSync(ctx, messages...)))
	default:
		return nil, fmt.Errorf("no mode %s", r.Mode)
	}
	return object{"results": results}, nil
}

func sendAsync(ctx context.Context, by rocketmq.Producer, messages []*primitive.Message) []object {
	results := make([]object, len(messages))
	var open sync.WaitGroup
	open.Add(len(messages))
	for i, message := range messages {
		err := by.SendAsync(ctx, func(_ context.Context, result *primitive.SendResult, err error) {
			results[i] = sent(result, err)
			open.Done()
		}, message)
		if err != nil {
			results[i] = object{"error": failure(err)}
			open.Done()
		}
	}
	open.Wait()
	return results
}
