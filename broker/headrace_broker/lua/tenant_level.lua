-- Counts the messages of one tenant in a queue. Writes nothing.
-- KEYS: WAITING, DELAYED_TENANTS, TENANT_IDS[]
-- ARGV: tenant, of_interest, lists[]
-- TENANT_IDS: one for each priority step. lists: those with unsorted messages. of_interest: the count up to which the result must be exact.
-- Returns {number of waiting messages, number of delayed ones, unix microseconds at which the oldest sorted message
-- entered its list or '', unix microseconds now}. Urgent and late messages do not count as the oldest: their scores
-- are no times.
-- Sorted messages, which a worker has moved from the lists to sorted sets, have counts by tenant. The others have to be
-- read: at most a thousand, and only if the count can reach `of_interest` with them. The lists are not in KEYS, because
-- Redis would refuse the script to a user that may not read messages. For such a user it counts sorted messages only.
local LOOKED_AT, LOOKED_AT_BYTES, CHUNK = 1000, 4 * 1024 * 1024, 50

local count = tonumber(redis.call('ZSCORE', WAITING, tenant) or 0)
local delayed = tonumber(redis.call('ZSCORE', DELAYED_TENANTS, tenant) or 0)
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
local unsorted, oldest = 0, nil
for _, list in ipairs(lists) do unsorted = unsorted + redis.call('LLEN', list) end
for _, ids in ipairs(TENANT_IDS) do
  local since = tonumber(redis.call('ZRANGE', ids, 0, now, 'BYSCORE', 'LIMIT', 0, 1, 'WITHSCORES')[2] or nil)
  if since and since < (oldest or math.huge) then oldest = since end
end

if count + delayed + unsorted >= tonumber(of_interest) then
  local left, bytes_left = LOOKED_AT, LOOKED_AT_BYTES
  for _, list in ipairs(lists) do
    local last = -1
    local may_read = redis.acl_check_cmd('LRANGE', list, last, last)
    while may_read and left > 0 and bytes_left > 0 do
      local bodies = redis.call('LRANGE', list, last - CHUNK + 1, last)
      if #bodies == 0 then break end
      for _, body in ipairs(bodies) do
        bytes_left = bytes_left - #body
        if tenant_of(body) == tenant then count = count + 1 end
      end
      left, last = left - #bodies, last - CHUNK
    end
  end
end
return {count, delayed, oldest and string.format('%.0f', oldest) or '', now}
