package main

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"sync/atomic"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/admin"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

var pullers atomic.Int64

var pullStatusNames = map[primitive.PullStatus]string{
	primitive.PullFound:         "FOUND",
	primitive.PullNoNewMsg:      "NO_NEW_MSG",
	primitive.PullNoMsgMatched:  "NO_MATCHED_MSG",
	primitive.PullOffsetIllegal: "OFFSET_ILLEGAL",
	primitive.PullBrokerTimeout: "BROKER_TIMEOUT",
}

// route is what the client library knows of a topic's queues.
func route(r request) ([]*primitive.MessageQueue, error) {
	tool, err := admin.NewAdmin(admin.WithResolver(resolver(r.Nameserver)))
	if err != nil {
		return nil, err
	}
	defer tool.Close()
	return tool.FetchPublishMessageQueues(context.Background(), r.Topic)
}

func queues(r request) (object, error) {
	found, err := route(r)
	if err != nil {
		return nil, err
	}
	ids := make([]int, 0, len(found))
	for _, queue := range found {
		ids = append(ids, queue.QueueId)
	}
	sort.Ints(ids)
	return object{"queues": ids}, nil
}

// withPullConsumer runs `use` with a consumer of its own, so that none stays behind in a group.
func withPullConsumer(r request, use func(rocketmq.PullConsumer, *primitive.MessageQueue) (object, error)) (object, error) {
	if r.QueueID == nil {
		return nil, errors.New("no queue_id")
	}
	found, err := route(r)
	if err != nil {
		return nil, err
	}
	for _, queue := range found {
		if queue.QueueId != *r.QueueID {
			continue
		}
		puller, err := rocketmq.NewPullConsumer(
			consumer.WithNsResolver(resolver(r.Nameserver)),
			consumer.WithGroupName(r.Group),
			consumer.WithInstance(fmt.Sprintf("pull-%d", pullers.Add(1))),
		)
		if err != nil {
			return nil, err
		}
		selector := consumer.MessageSelector{Type: consumer.TAG, Expression: r.Expression}
		if err := puller.Subscribe(r.Topic, selector); err != nil {
			return nil, err
		}
		if err := puller.Start(); err != nil {
			return nil, err
		}
		result, err := use(puller, queue)
		return result, errors.Join(err, puller.Shutdown())
	}
	return nil, fmt.Errorf("the route of %s has no queue %d", r.Topic, *r.QueueID)
}

func pull(r request) (object, error) {
	return withPullConsumer(r, func(puller rocketmq.PullConsumer, queue *primitive.MessageQueue) (object, error) {
		result, err := puller.PullFrom(context.Background(), queue, r.Offset, r.Count)
		if err != nil {
			return nil, err
		}
		for _, message := range result.GetMessageExts() {
			message.Queue = queue
		}
		return object{
			"status":      pullStatusNames[result.Status],
			"next_offset": result.NextBeginOffset,
			"min_offset":  result.MinOffset,
			"max_offset":  result.MaxOffset,
			"messages":    receivedAll(result.GetMessageExts()),
		}, nil
	})
}

func consumerOffset(r request) (object, error) {
	return withPullConsumer(r, func(puller rocketmq.PullConsumer, queue *primitive.MessageQueue) (object, error) {
		offset, err := puller.CurrentOffset(queue)
		return object{"offset": offset}, err
	})
}
