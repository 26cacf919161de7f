package main

import (
	"time"

	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// outgoing is a message to send. Go's JSON decodes Base64 into []byte by itself.
type outgoing struct {
	Body       []byte            `json:"body"`
	Tags       *string           `json:"tags"`
	Keys       *string           `json:"keys"`
	Level      int               `json:"level"`
	Properties map[string]string `json:"properties"`
	Sharding   *string           `json:"sharding"`
}

func (o outgoing) message(topic string, queue *primitive.MessageQueue) *primitive.Message {
	message := primitive.NewMessage(topic, o.Body)
	message.Queue = queue
	if o.Tags != nil {
		message.WithTag(*o.Tags)
	}
	if o.Keys != nil {
		message.WithKeys([]string{*o.Keys})
	}
	if o.Level != 0 {
		message.WithDelayTimeLevel(o.Level)
	}
	if o.Sharding != nil {
		message.WithShardingKey(*o.Sharding)
	}
	for name, value := range o.Properties {
		message.WithProperty(name, value)
	}
	return message
}

var statusNames = map[primitive.SendStatus]string{
	primitive.SendOK:                "SEND_OK",
	primitive.SendFlushDiskTimeout:  "FLUSH_DISK_TIMEOUT",
	primitive.SendFlushSlaveTimeout: "FLUSH_SLAVE_TIMEOUT",
	primitive.SendSlaveNotAvailable: "SLAVE_NOT_AVAILABLE",
}

func sent(result *primitive.SendResult, err error) object {
	if err != nil {
		return object{"error": failure(err)}
	}
	return object{
		"status":         statusNames[result.Status],
		"msg_id":         result.MsgID,
		"offset_msg_id":  result.OffsetMsgID,
		"queue_id":       result.MessageQueue.QueueId,
		"queue_offset":   result.QueueOffset,
		"transaction_id": result.TransactionID,
	}
}

func received(message *primitive.MessageExt) object {
	event := object{
		"receive_time":     time.Now().UnixMilli(),
		"topic":            message.Topic,
		"queue_offset":     message.QueueOffset,
		"body":             message.Body,
		"properties":       message.GetProperties(),
		"reconsume_times":  message.ReconsumeTimes,
		"msg_id":           message.MsgId,
		"offset_msg_id":    message.OffsetMsgId,
		"born_time":        message.BornTimestamp,
		"store_time":       message.StoreTimestamp,
		"commitlog_offset": message.CommitLogOffset,
	}
	if message.Queue != nil {
		event["queue_id"] = message.Queue.QueueId
	}
	if tags := message.GetTags(); tags != "" {
		event["tags"] = tags
	}
	if keys := message.GetKeys(); keys != "" {
		event["keys"] = keys
	}
	return event
}

func receivedAll(messages []*primitive.MessageExt) []object {
	all := make([]object, 0, len(messages))
	for _, message := range messages {
		all = append(all, received(message))
	}
	return all
}
